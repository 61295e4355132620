"""Speed and memory, side by side with other libraries: one file a question. The command is bench.py."""
