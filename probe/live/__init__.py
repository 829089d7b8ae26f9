"""One prompt and everything about it as plain arrays, for the live probe of the dashboard."""
