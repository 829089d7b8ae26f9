"""What must hold before a model's values are believed: its steps, its ties, its copies, its guards."""
