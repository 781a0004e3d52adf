"""Commands that run the library on real data and write tables, figures and CSV files.

`python -m experiments` lists them.
"""
