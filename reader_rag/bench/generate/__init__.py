"""Speed, memory and exactness of whole answers by several decoding methods."""
