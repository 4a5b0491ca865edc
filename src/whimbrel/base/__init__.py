"""The floor every room stands on: errors, atomic files, logging, seeds, progress. Knows no torch and no other room."""
