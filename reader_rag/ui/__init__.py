"""What the programs print and how they listen; nothing here is needed to use the library."""
