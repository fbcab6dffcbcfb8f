"""Draft sources from outside: when they are asked, and how what they propose is corrected and joined with search."""
