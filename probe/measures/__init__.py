"""What a number means (Measure), what it is (StatArray), its axes, its intervals, and how statistics collect it."""
