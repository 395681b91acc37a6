"""Figures of studies, from their plain summaries; vector output for print."""
