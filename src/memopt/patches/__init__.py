"""Rewrites of live modules: one folder for each patch. Every rewrite changes one module instance and can be undone.

`apply` carries out a plan and undoes it; `swap` gives one module another forward and keeps everything else of it.
"""
