"""Drawing: plain data in, a page, a figure or terminal text out.

Nothing here knows models, operators or maps. Everything drawn is a `record.MapView`.
"""
