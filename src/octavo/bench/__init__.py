"""`octavo bench`: does FP8 pay on this GPU (`layers`), and how fast is each kernel (`kernels`).

May import train and lower levels.
"""
