"""Shows and drives: the command line, the notebook runner, tables, charts and the book."""
