"""The command line: one module per command or group of commands. Only this package prints or exits."""
