"""Task 4's attention through other front ends: the same algorithm, the same checks.

cpp         C++ for the CPU: host.cpp, and naive.cpp beside it
operators   task 4's kernel, and task 5's, for torch.compile and torch.export

``python -m task4.frontends`` checks and times them; see README.md.
"""
