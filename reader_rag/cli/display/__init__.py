"""What the programs print."""
