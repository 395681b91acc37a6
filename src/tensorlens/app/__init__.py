"""The command line and the explorer. They parse, call and print; everything else is in the layers below."""
