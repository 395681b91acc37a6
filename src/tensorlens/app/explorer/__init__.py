"""The explorer: a small web server on this machine, for one person, and the page it serves.

`server` has the routes, `doors` who may ask and on which sockets, `limits` how much, `questions` what may be asked,
`jobs` the worker and its queue, `answers` the work and `rows` maps that fill row by row, `library` what was named at
start, `kept` what is kept between questions. The page is in `static/`; `views` draws the maps on it.
"""
