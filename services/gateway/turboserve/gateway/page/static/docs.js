// Shows the gateway's OpenAPI document with Swagger UI. Only this origin is called.
SwaggerUIBundle({
  url: "openapi.json",
  dom_id: "#operations",
  deepLinking: true,
  displayRequestDuration: true,
  defaultModelsExpandDepth: 0,
  // The default sends the document's address to a public validator.
  validatorUrl: null,
});
