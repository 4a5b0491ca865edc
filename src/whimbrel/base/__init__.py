"""Errors, atomic files, directory locks and progress reporting. Imports neither torch nor any other package of ours."""
