"""What is known of a rung beside its speed: accuracy, the bars that it has to meet, and the hardware's counters."""
