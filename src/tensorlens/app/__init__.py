"""The doors: the command line and the explorer. They parse, call and print; everything else lives below."""
