"""What methods do to a model's answers: questions on made documents, scores, means and pictures."""
