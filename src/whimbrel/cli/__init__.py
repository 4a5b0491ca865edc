"""The front door: one file per verb. The only room that prints or exits."""
