"""Problems to train and test on, one file each: rows, environment and grader. No training lives here."""
