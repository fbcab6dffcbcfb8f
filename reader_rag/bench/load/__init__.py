"""Load test: many concurrent requests, with cancelled and invalid ones among them."""
