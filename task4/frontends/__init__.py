"""Task 4's attention through other front ends: the same algorithm, the same checks.

cpp   C++ for the CPU: host.cpp, and naive.cpp beside it

``python -m task4.frontends`` checks and times them; see README.md.
"""
