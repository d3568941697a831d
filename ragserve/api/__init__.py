"""The HTTP API: one router per concern; `app.create_app` puts them in front of SGLang's own app."""
