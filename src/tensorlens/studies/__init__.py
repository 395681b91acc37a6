"""Studies: questions asked of maps and operators over many samples, as runs that can be interrupted."""
