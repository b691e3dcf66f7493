"""A run of many processes: components in actors, watched and restarted by one overseer.

Nothing here imports Ray; `penstock.overseer.ray` is the launcher that does.
"""
