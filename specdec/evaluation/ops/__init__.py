"""The ops against what they replace: a module a question, each with `cases(...)` for `measure.measure`.

Only torch and `specdec_kernels` are imported here, so that a plain checkout on a GPU machine can run them.
"""
