"""The page that people see first, and the API's documentation: static files, served from memory."""
