// an alias where all is settled, an offer where it is not, nothing where nothing fits
module @f attributes {mhlo.num_partitions = 8 : i32, mhlo.num_replicas = 1 : i32} {
  sdy.mesh @mesh = <["x"=2, "y"=4]>
  func.func public @main(%arg0: tensor<8x8xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}, {}]>, tf.aliasing_output = 1 : i32}, %arg1: tensor<8x8xf32> {jax.buffer_donor = true, sdy.sharding = #sdy.sharding<@mesh, [{"y"}, {}]>}, %arg2: tensor<4x8xf32>, %arg3: tensor<64xi32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}]>, tf.aliasing_output = 3 : i32}, %arg4: tensor<3xf32>) -> (tensor<8x8xf32>, tensor<8x8xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}, {}]>}, tensor<4x8xf32> {sdy.sharding = #sdy.sharding<@mesh, [{}, {}]>}, tensor<64xi32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}]>}, tensor<3xf32> {sdy.sharding = #sdy.sharding<@mesh, [{}]>}) {
    return %arg0, %arg1, %arg2, %arg3, %arg4 : tensor<8x8xf32>, tensor<8x8xf32>, tensor<4x8xf32>, tensor<64xi32>, tensor<3xf32>
  }
}
