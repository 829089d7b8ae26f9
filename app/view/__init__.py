"""What one request of the dashboard shows: the recordings at hand, the selection, the View."""
