"""Results: the answer of one method on one problem, as a record, in words and in files.

`result.Result` is that record and `answer.Answer` its placement; `advice` and `summary` put it in words, `result_json`
in a file.
"""
