"""The explorer: a small local web server over the library, and the page it serves.

`server` has the routes, `guard` who may ask, `questions` what may be asked, `jobs` the queue, `answers` the work,
`library` what was named at start, `recent` what is kept, `pictures` uploads. The page is in `static/`; maps on it are
drawn by the component of `views`.
"""
