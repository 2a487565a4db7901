"""What the pages and servers share: style, scripts, who may connect, and how long that may take."""
