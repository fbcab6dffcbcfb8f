"""What the programs print: results, messages, progress, errors."""
