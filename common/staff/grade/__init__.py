"""Grading what students handed in; ``python -m common.staff.grade --help``.

archives     opening a zip or a bundle without trusting it
submission   finding submissions, and the files of each that count
course       the fresh edition that a submission's answers are put into
one          one submission: its checks, its points
claims       what Results.md and the records of a submission say, beside what was found
pages        what comes out: a page for the student, Gradescope's file, the table
run          all of them: on this machine, and what is written while results come
slurm        all of them: in the jobs of a cluster
report       the report for the class
chart        its picture
leaderboard  its ranking, of those who take part
"""
