"""Speed and exactness of whole answers."""
