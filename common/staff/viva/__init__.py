"""Questions about a student's own code, with computed answers; ``python -m common.staff.grade SUBMISSION --viva N``.

changes    what in the written regions can be taken away, and the file without it
lab        runs the student's code in the judge's sandbox: with a change, or with its memory accesses counted
questions  "why this barrier": what the checks report without a line
launches   bank conflicts, occupancy and skipped tiles, from counted launches
figures    splits of the keys, and the student's own measurements against the roofline
probe      the process that chooses the questions and computes their answers, in a student edition without answers
page       starts it for a submission, and writes what it found
"""
