"""Single sign-on by OpenID Connect: who somebody is, and what their groups may do."""
