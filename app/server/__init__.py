"""HTTP: the frame of the page, exports, the server in a notebook."""
