"""Programs on checkpoints and machines: convert, scale_gates, show_gates, bench, doctor."""
