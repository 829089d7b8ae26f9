"""The live probe of the dashboard: its cards, its panels, its service and its queue of jobs."""
