"""What a trace answers: amounts by part, pictures and pages."""
