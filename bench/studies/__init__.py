"""The studies of docs/results.md on real weights: what is run (`runs`, `paper`, …), and the pages (`pages`)."""
