"""What is to be known about a GPU, measured by one command."""
