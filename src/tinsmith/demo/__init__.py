"""`tinsmith demo`; and `workshop/`, tiny models and datasets to run Tinker programs offline."""
