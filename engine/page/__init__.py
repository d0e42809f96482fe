"""The web page at `/weft`: HTML, CSS and JavaScript as they are in `static/`, and the routes that it needs."""
