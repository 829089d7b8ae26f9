"""Head ablation and the Dyck study: running them, and their results beside a recording."""
