"""Models that draft: assistant models of `transformers`, and EAGLE-3 heads in the speculators format."""
