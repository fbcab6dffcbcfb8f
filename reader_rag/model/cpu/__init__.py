"""Forward passes in compiled loops on the CPU."""
