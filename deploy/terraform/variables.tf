variable "project" {
  description = "The project's ID."
  type        = string

  validation {
    condition     = can(regex("^[a-z][a-z0-9-]{4,28}[a-z0-9]$", var.project))
    error_message = "A project's ID has 6 to 30 lower-case letters, digits and hyphens, and starts with a letter."
  }
}

variable "region" {
  description = "Where everything is: bucket, images, workers, schedule. Best where the accelerators will read the checkpoints."
  type        = string
  default     = "us-central1"

  validation {
    condition     = can(regex("^[a-z]+-[a-z]+[0-9]+$", var.region))
    error_message = "A region is named like us-central1."
  }
}

variable "bucket" {
  description = "The bucket's name, unique in the world. Default: PROJECT-weightbeam."
  type        = string
  default     = null

  validation {
    condition     = var.bucket == null || can(regex("^[a-z0-9][a-z0-9._-]{1,61}[a-z0-9]$", var.bucket))
    error_message = "A bucket's name has 3 to 63 lower-case letters, digits, hyphens, underscores and dots, without gs://."
  }
}

variable "image" {
  description = "The image that Cloud Build has pushed, with its tag. Without it there is no schedule yet."
  type        = string
  default     = null

  validation {
    condition     = var.image == null || can(regex("^[a-z0-9-]+-docker\\.pkg\\.dev/[^:@]+(:[A-Za-z0-9._-]+|@sha256:[0-9a-f]{64})$", var.image))
    error_message = "The image is REGION-docker.pkg.dev/PROJECT/weightbeam/weightbeam:TAG, or the same with @sha256:…."
  }
}

variable "watch_config" {
  description = "What `weightbeam watch` reads: which releases to convert, and into what. Default: watch.yaml in the bucket."
  type        = string
  default     = null

  validation {
    condition     = var.watch_config == null || can(regex("^gs://.+/.+$", var.watch_config))
    error_message = "The watch's configuration is an object: gs://BUCKET/NAME."
  }
}

variable "schedule" {
  description = "When to look for new releases, in cron's notation, UTC."
  type        = string
  default     = "17 * * * *"

  validation {
    condition     = length(split(" ", var.schedule)) == 5
    error_message = "A schedule has five fields: minute, hour, day of the month, month, day of the week."
  }
}

variable "releases_webhook" {
  description = "Whether the secret has a version with the URL that the watcher tells of each release, as $RELEASES_WEBHOOK in its configuration."
  type        = bool
  default     = false
}

variable "hub_token" {
  description = "Whether the secret has a version with the hub's token. Only gated and private models need one."
  type        = bool
  default     = false
}

variable "run_buckets" {
  description = "Buckets of training runs that the watcher follows: it may read them, and nothing else. The run's own account keeps its rights."
  type        = set(string)
  default     = []

  validation {
    condition     = alltrue([for name in var.run_buckets : can(regex("^[a-z0-9][a-z0-9._-]{1,61}[a-z0-9]$", name))])
    error_message = "A bucket's name has 3 to 63 lower-case letters, digits, hyphens, underscores and dots, without gs://."
  }
}

variable "publish_token" {
  description = "Whether the secret has a version with a token of the hub that may write, for runs that are published there."
  type        = bool
  default     = false
}
