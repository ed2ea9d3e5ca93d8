"""A grader that learns its rubrics from reference samples."""
