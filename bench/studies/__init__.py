"""The studies of docs/results.md on real weights: what is run (`runs`), and which claims hold (`claims`)."""
